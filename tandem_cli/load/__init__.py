"""Load for a running cell: what is asked and when, what clients see, what the processes say about it."""
