#!/usr/bin/env bash
# Certificates and first secrets for docker-compose.secure.yml; run again, it renews the certificates.
# `secure.sh secrets` takes one of the three steps to a new secret of the nodes. Running containers take
# both within two seconds. In BATONMQ_TLS_FOLDER (deploy/tls):
#
#   ca.pem, admin.pem          for clients and tools;   ca.key   keep it
#   nodes/SERVICE/             what one container sees: its certificate, ca.pem, and node.json
#   node.json                  the secret of the nodes
#   users.env, admin.yaml      the secret of the user admin; admin.yaml is for mqctl
#
# All of it happens in a container of the image, so the host needs neither mqctl nor root.
set -euo pipefail
cd "$(dirname "$0")"
case ${1:-} in "" | secrets) ;; *) echo "secure.sh $1: nothing or secrets is allowed" >&2; exit 2 ;; esac
setting() { local value=${!1:-}; echo "${value:-$(sed -n "s/^$1=//p" .env)}"; }
folder=$(setting BATONMQ_TLS_FOLDER)
mkdir -p "$folder"
docker run --rm --user 0 --network none --volume "$(cd "$folder" && pwd):/tls" \
  --env HOST="$(setting BATONMQ_ADVERTISE_HOST)" --env OWNER="$(id -u):$(id -g)" \
  --env WHAT="${1:-certificates}" \
  --entrypoint bash "$(setting BATONMQ_IMAGE)" -euc '
umask 077
cd /tls
secret() { head -c 24 /dev/urandom | base64 | tr +/ -_; }
if [ "$WHAT" = secrets ]; then
  [ -e node.json ] || { echo "there is no node.json: first secure.sh without a word" >&2; exit 2; }
  given=yes
  for each in nodes/*/node.json; do cmp -s node.json "$each" || given=no; done
  if [ $given = no ]; then # interrupted: with a further step some nodes would miss one
    echo "not all containers had the last step: it is given to them now" >&2
  else
    chown 0 node.json
    mqctl secure rotate --secrets /tls/node.json || { chown "$OWNER" node.json; exit 1; }
  fi
elif [ -e ca.key ]; then
  mqctl secure rotate /tls
else
  nodes=()
  for i in 1 2 3; do
    nodes+=(--node "broker/broker-a/$i@broker-$i,$HOST,127.0.0.1")
    nodes+=(--node "controller/n$i@namesrv-$i,$HOST,127.0.0.1")
  done
  mqctl secure init /tls "${nodes[@]}"
fi
inline=BATONMQ_AUTH__INNERCLIENTAUTHENTICATIONCREDENTIALS=
if [ ! -e node.json ]; then # of an earlier version it is in users.env
  if grep -qs "^$inline" users.env; then
    sed -n "s/^$inline//p" users.env >node.new
  else
    echo "{\"accessKey\":\"node\",\"secretKey\":\"$(secret)\"}" >node.new
  fi
  mv node.new node.json
fi
[ ! -e users.env ] || sed -i "/^$inline/d" users.env
give() { # SERVICE FILE: by rename, so that no process reads half of it
  install -d -m 755 nodes
  install -d -m 500 -o batonmq "nodes/$1"
  install -m 400 -o batonmq "$2" "nodes/$1/node.new"
  install -m 444 ca.pem "nodes/$1/ca.new"
  mv "nodes/$1/ca.new" "nodes/$1/ca.pem"
  mv "nodes/$1/node.new" "nodes/$1/node.pem"
  cmp -s node.json "nodes/$1/node.json" || { # each change is taken, and logged
    install -m 400 -o batonmq node.json "nodes/$1/json.new"
    mv "nodes/$1/json.new" "nodes/$1/node.json"
  }
}
for i in 1 2 3; do
  give "broker-$i" "broker.broker-a.$i.pem"
  give "namesrv-$i" "controller.n$i.pem"
done
if [ ! -e users.env ]; then
  admin=$(secret)
  printf "accessKey: admin\nsecretKey: %s\n" "$admin" >admin.yaml
  echo "BATONMQ_AUTH__INITAUTHENTICATIONUSER={\"username\":\"admin\",\"password\":\"$admin\"}" >users.env
fi
chown "$OWNER" . ca.pem ca.key ./*.pem users.env admin.yaml node.json
'
