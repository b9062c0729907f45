"""Where prefixes go that memory has no room for. `base` is the interface, `file` the tier in a directory.

Import order, lowest first: `base`, `tier_format`, `disk`, `usage`, `file`, `guard`, `registry`.
"""
