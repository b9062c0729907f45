"""Trio sockets: listeners, connections and the transport below them."""
