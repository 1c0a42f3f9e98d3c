"""The name server: which broker group serves which topic, and at which addresses.

`state` decides (pure; with `topics` and `live`), `endpoint` replies to requests, `kv_config` keeps
key-values, `service` wires listener, scan and the optional embedded controller, `main` is the
process. Origin: Java `namesrv` (`RouteInfoManager`, `DefaultRequestProcessor`,
`ClientRequestProcessor`).
"""
