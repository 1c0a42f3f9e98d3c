"""RocketMQ's remoting protocol: frames, their JSON and binary headers, and both ends of a socket.

`command` and `headers` are pure; `connection` and `endpoint` are the asyncio shells around them.
Both ends of a connection send requests, each with its own opaques. Origin: Java package `remoting`.
"""
