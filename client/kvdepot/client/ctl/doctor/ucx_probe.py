"""Which transports UCX finds here, as a program of its own: UCX may crash, and starts threads.

`python -I ucx_probe.py PACKAGE...` prints a list of JSON, such as `["tcp/eth0", "cma/memory"]`. The UCX is that of the
first of these packages of NIXL which is installed. It asks what `ucx_info -u m` would say, which the packages do not
have. Where there is none, the exit code is 1.
"""

import ctypes
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

_FEATURES = 1 << 0
_REMOTE_MEMORY = 1 << 1
_PARAMS_BYTES = 1024
_RESOURCE = re.compile(r"resource \d+ .* (\S+/\S+)\s*$", re.MULTILINE)


def main() -> int:
    library = _library(sys.argv[1:])
    if library is None:
        sys.stderr.write("there is no UCX of NIXL\n")
        return 1
    sys.stdout.write(json.dumps(_RESOURCE.findall(_described(library))) + "\n")
    return 0


def _library(packages: list[str]) -> str | None:
    for name in packages:
        spec = importlib.util.find_spec(name)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(f"{folder}.libs").glob("libucp-*.so*")):
                return str(path)
    return None


def _described(library: str) -> str:
    """Return what UCX prints about a context. Its header says how (ucp.h): the layouts used here are stable."""
    ucp, libc = ctypes.CDLL(library), ctypes.CDLL(None)
    major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
    params = (ctypes.c_uint64 * (_PARAMS_BYTES // 8))(_FEATURES, _REMOTE_MEMORY)  # which fields, and the first of them
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    if ucp.ucp_config_read(None, None, ctypes.byref(config)):
        return ""
    if ucp.ucp_init_version(major, minor, params, config, ctypes.byref(context)):
        return ""
    fd = os.memfd_create("ucx")
    libc.fdopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fdopen(fd, b"w"))
    ucp.ucp_context_print_info(context, stream)
    libc.fflush(stream)
    return os.pread(fd, 1 << 20, 0).decode(errors="replace")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # UCX may crash in the interpreter's exit
