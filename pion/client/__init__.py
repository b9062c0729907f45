"""Python clients of the server."""
