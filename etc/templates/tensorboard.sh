#!/bin/bash
# title: TensorBoard
# description: TensorBoard of the directory "runs". The node needs TensorBoard; LOGDIR names another directory.
# opens: yes
#HSUB --job-name=tensorboard --time=4:00:00 --mem=4G

# TensorBoard has no password. It listens at a socket whose directory only you can enter.
socket=$(htun socket) || exit 1
rm -f "$socket"
trap 'rm -rf "${socket%/*}"' EXIT

python3 - "$socket" "${LOGDIR:-runs}" <<'PYTHON'
import sys

from tensorboard import program
from werkzeug.serving import make_server


class SocketServer(program.TensorBoardServer):
    """Serves TensorBoard at a unix socket."""

    def __init__(self, app, flags):
        self._server = make_server("unix://" + sys.argv[1], 0, app, threaded=True)

    def serve_forever(self):
        self._server.serve_forever()

    def get_url(self):
        return "http://localhost:0/"  # it wants one with a port


board = program.TensorBoard(server_class=SocketServer)
board.configure(logdir=sys.argv[2])
sys.exit(board.main())
PYTHON
