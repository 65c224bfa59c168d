"""Who may touch which page: grants, hand-over, spans, transports."""
