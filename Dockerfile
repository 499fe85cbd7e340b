# All of Outrider, with the command `outrider`. Built in the repository's root:
#   docker build --tag outrider:cpu .
#   docker build --tag outrider:cuda --build-arg DEVICE=cuda .
#   docker build --tag outrider:vllm --build-arg DEVICE=vllm .
# With a bill of materials: docker buildx build --sbom=true --provenance=true ... --push
ARG PYTHON=python:3.11.14-slim-bookworm
ARG DEVICE=cpu

FROM ${PYTHON} AS tools
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never VIRTUAL_ENV=/opt/python
RUN pip install --no-cache-dir uv==0.9.9
WORKDIR /src
COPY pyproject.toml constraints.txt constraints-cuda.txt constraints-vllm.txt ./
RUN uv venv /opt/python

FROM tools AS packages-cpu
RUN uv pip install --constraints constraints.txt --torch-backend cpu -r pyproject.toml

FROM tools AS packages-cuda
RUN uv pip install --constraints constraints.txt --constraints constraints-cuda.txt --extra cuda -r pyproject.toml

FROM tools AS packages-vllm
RUN uv pip install --constraints constraints-vllm.txt --extra vllm -r pyproject.toml

# In a folder of its own, so that a new version of Outrider is a small layer.
# hadolint ignore=DL3006
FROM packages-${DEVICE} AS build
WORKDIR /src
COPY . .
RUN uv pip install --no-deps --target /opt/outrider .

FROM ${PYTHON} AS system-cpu

FROM ${PYTHON} AS system-cuda
# CUDA's libraries come with torch's wheels, the driver from the host. Triton compiles launchers in C.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM system-cuda AS system-vllm

# hadolint ignore=DL3006
FROM system-${DEVICE}
ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="Outrider" \
    org.opencontainers.image.description="Speculative decoding as a distributed service" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/python /opt/python
COPY --from=build /opt/outrider /opt/outrider
# All that is written lies under two folders: the root file system can be read-only.
RUN install -d -o 10001 -g 10001 /var/cache/outrider
ENV PATH=/opt/outrider/bin:/opt/python/bin:$PATH \
    PYTHONPATH=/opt/outrider \
    HOME=/tmp \
    HF_HOME=/var/cache/outrider/huggingface \
    XDG_CACHE_HOME=/var/cache/outrider \
    NUMBA_CACHE_DIR=/var/cache/outrider/numba \
    TRITON_CACHE_DIR=/var/cache/outrider/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/outrider/inductor \
    FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 \
    FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=/var/cache/outrider/flash-attention \
    CUTE_DSL_CACHE_DIR=/var/cache/outrider/cute \
    FLASHINFER_WORKSPACE_BASE=/var/cache/outrider \
    VLLM_CACHE_ROOT=/var/cache/outrider/vllm \
    OUTRIDER_HOST=0.0.0.0 \
    PYTHONUNBUFFERED=1
USER 10001:10001
# HTTP and gRPC of `outrider serve`.
EXPOSE 8000 50051
ENTRYPOINT ["outrider"]
CMD ["--help"]
