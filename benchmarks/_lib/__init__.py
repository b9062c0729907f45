"""What the benchmarks share: pinning, raw sockets, peers in processes of their own, interleaving, reports."""
