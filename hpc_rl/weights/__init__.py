"""Publication of weights: the transports by name."""

# `module:class`; the class takes a TransportContext (transport.py)
TRANSPORTS = {
    "disk": "hpc_rl.weights.disk_transport:DiskTransport",
    "xccl": "hpc_rl.weights.collective_transport:CollectiveTransport",
}
