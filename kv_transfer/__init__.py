"""Who may touch which page: grants, hand-over plans, transports. Nothing here knows the engine."""
