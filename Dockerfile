# The controller as a small image that runs as an ordinary user. docs/running.md tells how to run it.
#   docker build -t reconcile .
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends python3 python3-venv
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY controller controller
# pip is of no use in the image, and is a quarter of it
RUN python3 -m venv /opt/reconcile \
    && /opt/reconcile/bin/pip install --no-cache-dir . \
    && /opt/reconcile/bin/pip uninstall -y -q setuptools pip

FROM ${BASE}
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends python3 \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --no-create-home --home-dir /state --shell /usr/sbin/nologin --uid 10001 reconcile \
    && install -d -o reconcile -g reconcile -m 0700 /state
COPY --from=build /opt/reconcile /opt/reconcile
ENV PATH=/opt/reconcile/bin:$PATH RECONCILE_SPECS=/specs RECONCILE_STATE=/state PYTHONUNBUFFERED=1
USER 10001
WORKDIR /state
VOLUME /state
EXPOSE 9797
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9797/healthz', timeout=5)"]
# Inside the container any address; who reaches it is said where the port is published.
ENTRYPOINT ["reconcile"]
CMD ["run", "--listen", "0.0.0.0:9797"]
