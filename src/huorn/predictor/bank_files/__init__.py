"""The Python files of a released bank. They need torch, safetensors and Pydantic, never huorn, and import only each other."""
