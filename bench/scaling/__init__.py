"""Autoscaling tried out: the decisions of Kubernetes' HPA and of KEDA as pure code, over a simulated cell or a real Prometheus.

`python -m bench.scaling TRACE`; docs/scaling.md says what it shows and how.
"""
