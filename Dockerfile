# The controller as a small image that runs as an ordinary user.
#   docker build -t reconcile . && docker run --rm -v ./specs:/specs:ro -v reconcile:/state reconcile validate
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE /source/
COPY controller /source/controller
RUN python3 -m venv /opt/reconcile && /opt/reconcile/bin/pip install --no-cache-dir --no-compile /source

FROM ${BASE}
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends python3 openssh-client \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --create-home --uid 10001 reconcile \
    && install -d -o reconcile -g reconcile -m 0700 /state
COPY --from=build /opt/reconcile /opt/reconcile
ENV PATH=/opt/reconcile/bin:$PATH RECONCILE_SPECS=/specs RECONCILE_STATE=/state
USER reconcile
VOLUME /state
ENTRYPOINT ["reconcile"]
CMD ["--help"]
