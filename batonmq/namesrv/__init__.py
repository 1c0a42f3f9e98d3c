"""The name server: which broker group serves which topic, and at which addresses.

`state.py` decides (pure), `endpoint.py` replies to requests, `kv_config.py` keeps key-values,
`service.py` wires listener, scan and the optional embedded controller, `main.py` is the process.
Origin: Java `namesrv`
(`RouteInfoManager`, `DefaultRequestProcessor`, `ClientRequestProcessor`).
"""

__all__: list[str] = []
