# Scorer and proposer, which share all layers. Built in the repository's root, four images:
#   docker build -f k8s/images/engine.Dockerfile --build-arg DEVICE=cuda --target scorer \
#     -t registry.example.com/outrider/outrider-scorer:0.1.0-cuda .
# DEVICE: cpu or cuda; --target: scorer or proposer.
ARG PYTHON=python:3.11.14-slim-bookworm
ARG DEVICE=cpu

FROM ${PYTHON} AS build
ARG DEVICE
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
RUN pip install --no-cache-dir uv==0.9.9
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY k8s/images k8s/images
RUN k8s/images/install.sh dependencies "${DEVICE}" /opt/python
COPY . .
RUN k8s/images/install.sh services "${DEVICE}" /opt/outrider

FROM ${PYTHON} AS cpu

FROM ${PYTHON} AS cuda
# CUDA's libraries come with torch's wheels, the driver from the node. Triton compiles launchers in C.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility

# hadolint ignore=DL3006
FROM ${DEVICE} AS engine
COPY --from=build /opt/python /opt/python
COPY --from=build /opt/outrider /opt/outrider
# All that is written lies under two folders: the root file system can be read-only.
RUN install -d -o 10001 -g 10001 /var/cache/outrider
ENV PATH=/opt/python/bin:$PATH \
    PYTHONPATH=/opt/outrider \
    HOME=/tmp \
    HF_HOME=/var/cache/outrider/huggingface \
    XDG_CACHE_HOME=/var/cache/outrider \
    NUMBA_CACHE_DIR=/var/cache/outrider/numba \
    TRITON_CACHE_DIR=/var/cache/outrider/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/outrider/inductor \
    PYTHONUNBUFFERED=1
USER 10001:10001

FROM engine AS proposer
EXPOSE 7003
ENTRYPOINT ["python", "-P", "-m", "proposer_service"]

FROM engine AS scorer
EXPOSE 7001 7002
ENTRYPOINT ["python", "-P", "-m", "scorer_service"]
