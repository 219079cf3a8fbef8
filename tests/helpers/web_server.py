"""nginx on this machine, which compresses whatever it may: a real web server behind what stand-ins only resemble."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cloud_servers import ENDS_WITH_US, free_port
from waiting import HANG_S

_CONFIGURATION = """
daemon off;
master_process off;
pid {own}/pid;
error_log {own}/errors;
events {{}}
http {{
  access_log off;
  client_body_temp_path {own}/body;
  proxy_temp_path {own}/proxy;
  fastcgi_temp_path {own}/fastcgi;
  uwsgi_temp_path {own}/uwsgi;
  scgi_temp_path {own}/scgi;
  gzip on;
  gzip_min_length 1;
  gzip_types *;
  server {{ listen 127.0.0.1:{port}; root {folder}; autoindex on; }}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, own: Path) -> Iterator[str]:
    """The address of a folder that nginx serves; `own` is a new folder for its files."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin:/opt/homebrew/bin")
    if program is None:
        pytest.skip("nginx is missing: apt-get install nginx-light")
    own.mkdir()
    port = free_port()
    (own / "conf").write_text(_CONFIGURATION.format(own=own, port=port, folder=folder))
    command = [*ENDS_WITH_US, program, "-e", str(own / "errors"), "-c", str(own / "conf")]
    url, ends_s = f"http://127.0.0.1:{port}", time.monotonic() + HANG_S
    with subprocess.Popen(command) as process:
        try:
            while True:
                try:
                    urllib.request.urlopen(url).close()
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < ends_s, (own / "errors").read_text()
                    time.sleep(0.01)
            yield url
        finally:
            process.kill()
