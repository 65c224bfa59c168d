"""Metrics, traces and logs. Every metric is declared once; nothing here can raise into the data path."""
