#!/bin/sh
# The image's entry point: `namesrv|controller|broker -c FILE`, or any other command of `batonmq`.
set -e
password=/var/lib/batonmq-raft/password

# Controllers share the volume of the Raft password: the first one makes it.
if [ "$1" = namesrv ] && [ ! -s "$password" ]; then
  own=$password.$(hostname)
  (umask 077 && head -c 32 /dev/urandom | base64 >"$own")
  ln "$own" "$password" 2>/dev/null || true # another one was faster
  rm -f "$own"
fi

case $1 in
  # As `batonmq` does, without the cost of its own start.
  namesrv | controller | broker) module=batonmq.$1.main; shift; exec python -P -m "$module" "$@" ;;
  *) exec batonmq "$@" ;;
esac
