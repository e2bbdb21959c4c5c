"""A model's name, folder or file -> a runner."""
