#!/usr/bin/env bash
# Builds the image where `docker build` itself reaches no package index: the wheels are fetched by
# this machine's pip, with whatever index and proxy it is configured for, and copied in.
#
#   deploy/build-image.sh            (image batonmq:latest; base batonmq-base:bookworm)
#
# Environment: BATONMQ_IMAGE; BATONMQ_BASE_IMAGE (build-base.sh makes the default one if it is
# missing, any other is the engine's to find); PYTHON, of the base image's version, whose pip is
# used (default: .venv's, else python3.11).
set -euo pipefail
cd "$(dirname "$0")/.."
image=${BATONMQ_IMAGE:-batonmq:latest}
own_base=batonmq-base:bookworm
base=${BATONMQ_BASE_IMAGE:-$own_base}
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3.11

if [ "$base" = "$own_base" ] && ! docker image inspect "$base" >/dev/null 2>&1; then
  deploy/build-base.sh "$base"
fi
if ! cmp -s requirements.lock deploy/wheelhouse/made-from.lock; then
  echo "build-image: wheels of requirements.lock"
  rm -f deploy/wheelhouse/*.whl deploy/wheelhouse/made-from.lock
  "$python" -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; print("hatchling", *project["dependencies"], *project["optional-dependencies"]["server"], sep="\n")' \
    >deploy/wheelhouse/needed.txt
  "$python" -m pip wheel --quiet --disable-pip-version-check --wheel-dir deploy/wheelhouse \
    -c requirements.lock -r deploy/wheelhouse/needed.txt
  cp requirements.lock deploy/wheelhouse/made-from.lock
fi
docker build --quiet --build-arg BASE_IMAGE="$base" -f deploy/Dockerfile -t "$image" . >/dev/null
echo "build-image: $image is there"
