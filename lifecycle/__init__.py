"""The life of a request: states, edges, endings, clocks, counts. No clock, no I/O, standard library only."""
