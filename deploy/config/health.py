"""`health.py KIND PORT [KIND PORT …]`: checks the processes on this container's ports.

KIND is namesrv, controller or broker. Exit code 0: all reply, and a controller knows its leader;
1: one does not, and the line names it. It imports no package of the project: the engine runs it
every few seconds, so it must cost no more than the start of the interpreter. It dials with TLS and
signs as the nodes do where the environment of the container says that the process does.
"""

import json
import os
import socket
import struct
import sys

CODES = {"namesrv": 106, "controller": 1005, "broker": 28}
TIMEOUT_S = 3.0


def ask(port: int, code: int) -> dict:
    """The header of the reply. Raises OSError or EOFError."""
    head = {"code": code, "flag": 0, "opaque": 1, "version": 479, "language": "JAVA"}
    header = json.dumps({**head, "extFields": signature()})
    frame = struct.pack(">II", 4 + len(header), len(header)) + header.encode()
    with secured(socket.create_connection(("127.0.0.1", port), TIMEOUT_S)) as connection:
        connection.sendall(frame)
        stream = connection.makefile("rb")
        head = stream.read(8)
        if len(head) < 8:
            raise EOFError("closed the connection")
        return json.loads(stream.read(int.from_bytes(head[5:8], "big")))


def secured(connection: socket.socket) -> socket.socket:
    if os.environ.get("BATONMQ_TLS__SERVERMODE") != "enforcing":
        return connection
    import ssl

    context = ssl.create_default_context(cafile=os.environ["BATONMQ_TLS__SERVERTRUSTCERTPATH"])
    return context.wrap_socket(connection, server_hostname="127.0.0.1")


def signature() -> dict:
    if os.environ.get("BATONMQ_AUTH__AUTHENTICATIONENABLED") != "true":
        return {}
    import base64
    import hmac

    inline = "BATONMQ_AUTH__INNERCLIENTAUTHENTICATIONCREDENTIALS"
    file = os.environ.get(f"{inline}FILE")
    if file:
        with open(file, encoding="utf-8") as text:
            node = json.load(text)
    else:
        node = json.loads(os.environ[inline])
    name = node["accessKey"]
    made = hmac.digest(node["secretKey"].encode(), name.encode(), "sha1")
    return {"AccessKey": name, "Signature": base64.b64encode(made).decode()}


def complaint(kind: str, port: int) -> str:
    """What is wrong with one process; empty if nothing is."""
    try:
        reply = ask(port, CODES[kind])
    except (OSError, EOFError, ValueError) as error:
        return f"{kind} on port {port}: {error}"
    if reply.get("code") != 0:
        return f"{kind} on port {port}: answers {reply.get('code')} {reply.get('remark') or ''}"
    if kind == "controller" and not (reply.get("extFields") or {}).get("controllerLeaderId"):
        return f"controller on port {port}: knows no leader"
    return ""


def main(arguments: list) -> int:
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    wrong = [found for kind, port in pairs if (found := complaint(kind, int(port)))]
    print("; ".join(wrong) or "well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
