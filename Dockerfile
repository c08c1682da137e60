# kvdepotd and kvdepotctl, without an engine and without torch. Build it from the repository's root:
#   docker build -t kvdepot:0.3.0 .
# A site that mirrors images names its own, best by digest: --build-arg BASE=registry.example/python@sha256:...
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY requirements/build.txt requirements/image.txt requirements/
RUN python -m venv /build \
 && /build/bin/pip install --no-cache-dir --no-deps -r requirements/build.txt \
 && python -m venv --without-pip /opt/kvdepot \
 && /build/bin/pip --python /opt/kvdepot/bin/python install --no-cache-dir --no-deps -r requirements/image.txt
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY core core
COPY proto proto
COPY server server
COPY client client
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /build/bin/pip --python /opt/kvdepot/bin/python install --no-deps --no-index /wheels/*.whl \
 && /opt/kvdepot/bin/kvdepotctl assets write config --to /etc/kvdepot

FROM ${BASE}
# A fixed number: host directories are given to it (configs/kubernetes/daemonset.yaml).
RUN groupadd --gid 10001 kvdepot \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/kvdepot --shell /usr/sbin/nologin kvdepot \
 && install -d -o kvdepot -g kvdepot -m 0755 /run/kvdepot \
 && install -d -o kvdepot -g kvdepot -m 0700 /var/lib/kvdepot /var/lib/kvdepotd
COPY --from=build /opt/kvdepot /opt/kvdepot
COPY --from=build /etc/kvdepot/kvdepot.toml /etc/kvdepot/kvdepot.toml
LABEL org.opencontainers.image.title="kvdepot" \
      org.opencontainers.image.description="KV-cache storage daemon for LLM engines" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/kvdepot/bin:$PATH KVDEPOT_ENDPOINT=unix:///run/kvdepot/kvdepot.sock
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s --retries=3 CMD ["kvdepotctl", "status", "--json"]
ENTRYPOINT ["kvdepotd"]
CMD ["serve", "/etc/kvdepot/kvdepot.toml"]
