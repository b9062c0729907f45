"""Pure protocol code: bytes in, requests out; replies in, buffers out. Knows no trio and no storage."""
