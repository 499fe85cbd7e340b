# The gateway: no torch, no weights. Built in the repository's root:
#   docker build -f k8s/images/gateway.Dockerfile -t registry.example.com/outrider/outrider-gateway:0.1.0 .
ARG PYTHON=python:3.11.14-slim-bookworm

FROM ${PYTHON} AS build
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
RUN pip install --no-cache-dir uv==0.9.9
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY k8s/images k8s/images
RUN k8s/images/install.sh dependencies gateway /opt/python
COPY . .
RUN k8s/images/install.sh services gateway /opt/outrider

FROM ${PYTHON}
COPY --from=build /opt/python /opt/python
COPY --from=build /opt/outrider /opt/outrider
# All that is written lies under two folders: the root file system can be read-only.
RUN install -d -o 10001 -g 10001 /var/cache/outrider
ENV PATH=/opt/python/bin:$PATH \
    PYTHONPATH=/opt/outrider \
    HOME=/tmp \
    HF_HOME=/var/cache/outrider/huggingface \
    PYTHONUNBUFFERED=1
USER 10001:10001
# 8000 HTTP, 50051 gRPC, if the flags say so as the chart's do.
EXPOSE 8000 50051
ENTRYPOINT ["python", "-P", "-m", "gateway"]
