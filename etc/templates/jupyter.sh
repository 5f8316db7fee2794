#!/bin/bash
# title: Jupyter
# description: JupyterLab, or the notebook server, in the job's directory. The node needs Jupyter.
# opens: yes
#HSUB --job-name=jupyter --time=4:00:00 --cpus-per-task=2

# Only you can enter the directory of this socket, so that the server needs no password.
socket=$(htun socket) || exit 1
rm -f "$socket"
trap 'rm -rf "${socket%/*}"' EXIT

if jupyter lab --version >/dev/null 2>&1; then kind=lab; else kind=server; fi
jupyter "$kind" --no-browser --ServerApp.sock="$socket" --ServerApp.sock_mode=0600 \
    --IdentityProvider.token= --PasswordIdentityProvider.hashed_password= --ServerApp.allow_remote_access=True \
    $([ "$(id -u)" = 0 ] && echo --allow-root)
