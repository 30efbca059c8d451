#!/bin/sh
# An ssh server on port 2222 without root; the key pair in the volume $KEYS is made by whichever host comes first.
# With arguments: wait for the hosts in $HOSTS, then run them (the launching host).
set -eu

keys=${KEYS:-/keys}
mkdir -p "$HOME/.ssh" && chmod 700 "$HOME/.ssh"
if mkdir "$keys/making" 2>/dev/null; then
    ssh-keygen -q -t ed25519 -N '' -f "$keys/new" && mv "$keys/new.pub" "$keys/id.pub" && mv "$keys/new" "$keys/id"
fi
until [ -e "$keys/id" ]; do sleep 0.2; done
install -m 600 "$keys/id" "$HOME/.ssh/id_ed25519"
install -m 600 "$keys/id.pub" "$HOME/.ssh/authorized_keys"

if [ $# -gt 0 ]; then
    for host in $HOSTS; do
        until ssh -o ConnectTimeout=1 "$host" true 2>/dev/null; do sleep 0.5; done
    done
    exec "$@"
fi
ssh-keygen -q -t ed25519 -N '' -f "$HOME/.ssh/host_key"
exec /usr/sbin/sshd -D -e -p 2222 -o "HostKey=$HOME/.ssh/host_key" -o PidFile=none -o UsePAM=no
