"""A fake Kubernetes API server, with the parts of a controller and a kubelet that Jobs need.

Jobs are validated against the OpenAPI schemas that Kubernetes publishes; requests are checked against the Role in
docs/how-to/run-scripts-on-kubernetes.md and against hand-written lists of parameters. Everything else follows the
Kubernetes documentation.
"""
