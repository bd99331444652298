"""A stand-in for a Kubernetes API server, with as much of a controller and a kubelet as Jobs need.

It is no Kubernetes.  Bodies of Jobs are held to the OpenAPI schemas that Kubernetes publishes, requests to the Role in
docs/how-to/run-scripts-on-kubernetes.md and to lists of parameters written by hand.  All else is as we read the
documentation.
"""
