"""RocketMQ's remoting protocol: frames, their JSON and binary headers, and both ends of a socket.

`codec` and `protocol` are pure; `connection`, `server` and `client` are the asyncio shells around
them. A frame is `i32 length`, `u8 type + u24 headerLen`, header, body; both ends of a connection
send requests, each in its own space of opaques. Origin: Java package `remoting`.
"""

__all__: list[str] = []
