#!/usr/bin/env bash
# Starts Debian's Docker engine by hand, where no service manager does, and waits until it answers:
#
#   deploy/start-engine.sh           (as root; a running engine is left as it is)
#
# Prints the id of the engine's process if this call started it, to be ended with `kill`; nothing
# otherwise. Images and volumes stay in /var/lib/docker. Log: /var/log/batonmq-dockerd.log.
set -euo pipefail
log=/var/log/batonmq-dockerd.log
socket=${DOCKER_SOCKET:-/var/run/docker.sock}

answers() { docker -H "unix://$socket" info >/dev/null 2>&1; }

if answers; then exit 0; fi
for tool in dockerd iptables docker; do
  command -v "$tool" >/dev/null || { echo "start-engine: $tool is missing (apt-get install docker.io iptables)" >&2; exit 1; }
done
# A container's control groups need their file systems; a bare machine may have none mounted.
if ! grep -q ' /sys/fs/cgroup' /proc/mounts; then
  mount -t cgroup2 none /sys/fs/cgroup
fi
setsid dockerd -H "unix://$socket" --log-level warn </dev/null >"$log" 2>&1 &
pid=$!
for _ in $(seq 300); do
  if answers; then echo "$pid"; exit 0; fi
  kill -0 "$pid" 2>/dev/null || break
  sleep 0.1
done
echo "start-engine: dockerd does not answer; the end of $log:" >&2
tail -n 20 "$log" >&2
kill "$pid" 2>/dev/null || true
exit 1
