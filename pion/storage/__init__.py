"""Blocks, sessions, prefixes and everything that holds state. Knows no sockets and no mlx."""
