"""Reports: every record of the lab as JSON and as one page to read. Nothing here measures."""
