"""The broker process: processors behind the remoting door, and the wiring of store, HA and role.

Processors take a decoded request and return a reply; they know no socket beyond the `Connection`
that a held answer goes back to. `broker.service.BrokerService` builds the process out of its parts,
`broker.main` runs it alone.
"""
