"""A second client: the ordinary `batonmq.Producer`, as an application would use it.

`python -m lab.faults.client` sends until its input ends, then prints one JSON line: how many sends
were acknowledged, the errors of those that failed, and the longest time between two acks.
"""

import argparse
import json
import sys
from typing import Final

from batonmq import ClientOptions, ClientTls, Credentials
from lab.cluster import frames
from lab.cluster.client_writer import ClientWriter
from lab.cluster.writer import wait_acks

TOPIC: Final = "FaultsClient"


def _options() -> ClientOptions:
    if not (folder := frames.tls_folder()):
        return ClientOptions()
    user = Credentials(access_key=frames.USER, secret_key=frames.SECRET)
    return ClientOptions(tls=ClientTls(trust_cert_path=str(folder / "ca.pem")), credentials=user)


def main() -> None:
    parser = argparse.ArgumentParser(prog="lab.faults.client")
    parser.add_argument("name_servers", help="host:port, several joined by ';'")
    with ClientWriter(parser.parse_args().name_servers, TOPIC, options=_options()) as writer:
        wait_acks(writer, 1)
        print("ready", flush=True)
        sys.stdin.read()
    counts = {"sent": len(writer.acks), "failed": writer.failures, "gapS": writer.longest_gap_s}
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
