"""An OpenAI-compatible server over ``AsyncLLM``. pydantic, fastapi, uvicorn and prometheus-client live only here."""
