#!/bin/bash
# title: Code editor
# description: code-server (VS Code in the browser) in the job's directory. The node needs code-server.
# opens: yes
#HSUB --job-name=code-server --time=8:00:00 --cpus-per-task=2

# Only you can enter the directory of this socket, so that the server needs no password.
socket=$(htun socket) || exit 1
rm -f "$socket"
trap 'rm -rf "${socket%/*}"' EXIT

code-server --auth none --socket "$socket" --socket-mode 600 --disable-telemetry --disable-update-check "$PWD"
