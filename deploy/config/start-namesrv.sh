#!/bin/sh
# Starts a name server. The three share the volume of the Raft password: whoever comes first makes it.
set -e
file=/var/lib/batonmq-raft/password
if [ ! -s "$file" ]; then
  own=$file.$(hostname)
  rm -f "$own"
  python -c 'import pathlib, sys; from controller.raft.password import make_password as make
make(pathlib.Path(sys.argv[1]))' "$own"
  ln "$own" "$file" 2>/dev/null || true # another one was faster
  rm -f "$own"
fi
exec batonmq "$@"
