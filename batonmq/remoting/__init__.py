"""RocketMQ's remoting protocol. `command` and `headers` are pure; `connection` and `endpoint` are
the asyncio shells. Both ends of a connection send requests, each with its own opaques. Origin: Java
package `remoting`."""
