"""A place where sites meet, without torch: answers as the real one does, with as many sites as the file `heard` says, or none."""

import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Status(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        heard = Path("heard")
        self.wfile.write(f"[{heard.read_text() if heard.exists() else 0} heartbeating]".encode())
        Path("asked").touch()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


host, _, port = sys.argv[1].rpartition(":")
server = HTTPServer((host, int(port)), Status)
print(f"server {os.getpid()} at {sys.argv[1]} {' '.join(sys.argv[2:])}", flush=True)
server.serve_forever()
