#!/usr/bin/env bash
# Replays the steps of the CPU image in a fresh Debian root, for machines without a Docker engine.
# Needs root, debootstrap and about 1 GB under $TMPDIR. EXTRAS as in the Dockerfile; "mpi" alone is enough for numpy.
set -euo pipefail

extras=${EXTRAS:-mpi}
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
root=$(mktemp -d) && chmod 755 "$root"
cleanup() {
    for folder in /dev /sys /proc "${borrowed[@]}"; do
        if mountpoint -q "$root$folder"; then umount -R "$root$folder"; fi
    done
    rm -rf --one-file-system "$root"
}
borrowed=()
trap cleanup EXIT

# What python:slim has: Python, pip, no compiler.
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /dev "$root/dev" && mount --make-rslave "$root/dev"
cp /etc/resolv.conf "$root/etc/resolv.conf"

# A machine that reaches its package index by settings of its own lends them to the replay.
for file in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
    if [ -e "$file" ]; then install -D "$file" "$root$file"; fi
done
for folder in $(python3 -m pip config get global.find-links 2>/dev/null || true); do
    if [ -d "$folder" ]; then
        mkdir -p "$root$folder" && mount --bind "$folder" "$root$folder" && borrowed+=("$folder")
    fi
done

mkdir -p "$root/source" "$root/wheels"
tar -C "$source" --exclude='.venv*' --exclude=.git -cf - . | tar -C "$root/source" -xf -
in_root() { chroot "$root" /usr/bin/env -i HOME=/root PATH=/opt/python/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"; }

in_root python3 -m venv /opt/python
in_root sh -c '! command -v cc && ! command -v gcc' # no compiler, as in the image
in_root python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source
in_root sh /source/docker/cpu/install.sh /wheels "$extras"
cp -r "$source/examples" "$root/home/trainer/examples"

as_trainer() { in_root su trainer -s /bin/sh -c "export PATH=/opt/python/bin:\$PATH; cd; $1"; }
as_trainer 'horo-lite doctor'
as_trainer 'horo-lite run -np 2 examples/numpy_statistics_distributed.py'
as_trainer 'mpirun -np 4 python examples/numpy_statistics_distributed.py'
case ,$extras, in *,torch,*) as_trainer 'horo-lite run -np 2 examples/torch_digits_distributed.py' ;; esac
echo 'replay passed'
