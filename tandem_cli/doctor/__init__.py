"""What a cell needs, checked: on this machine, at its store, of its processes. Measuring and judging are kept apart."""
