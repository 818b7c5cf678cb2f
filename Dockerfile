# What runs the service. CUDA comes inside torch's own wheels, so the base is a plain Python; the host brings the driver.
#   docker build -t attn .
#   docker build -t attn:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# BASE_IMAGE: Debian or Ubuntu with `python` 3.11 or newer and its venv module; the same one builds and runs.
ARG BASE_IMAGE=python:3.12-slim


# What the layer of dependencies hangs on, and nothing else of pyproject.toml.
FROM ${BASE_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml constraints.txt ./
# The release of torch is TORCH_SPEC's to say.
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > requirements.txt \
    && sed --in-place '/^torch==/d' constraints.txt


FROM ${BASE_IMAGE} AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# pip stays in a venv of its own: what runs needs none.
RUN python -m venv /opt/pip && python -m venv --without-pip /opt/attn
# A mirror of PyPI; and where torch is looked for besides it.
ARG PIP_INDEX_URL=https://pypi.org/simple
ARG TORCH_INDEX=https://pypi.org/simple
ARG TORCH_SPEC=torch==2.13.0
RUN /opt/pip/bin/pip --python /opt/attn/bin/python install --extra-index-url "${TORCH_INDEX}" "${TORCH_SPEC}"
COPY --from=requirements /requirements/requirements.txt /requirements/constraints.txt /requirements/
# TORCH_SPEC once more, so that a release too old for us fails here and is not replaced.
RUN /opt/pip/bin/pip --python /opt/attn/bin/python install \
    --constraint /requirements/constraints.txt --requirement /requirements/requirements.txt "${TORCH_SPEC}"


FROM dependencies AS application
WORKDIR /source
COPY pyproject.toml README.md ./
COPY attn_core attn_core
COPY service service
# Into a folder of its own, so that new code is a layer of kilobytes upon gigabytes of torch.
RUN /opt/pip/bin/pip --python /opt/attn/bin/python install --no-deps --prefix /application .


FROM ${BASE_IMAGE} AS runtime
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini=0.19.* \
    && rm -rf /var/lib/apt/lists/*
COPY --from=dependencies /opt/attn /opt/attn
COPY --from=application /application /opt/attn

# The root may be read-only: bytecode was written at build, and the caches of torch, Triton and CUDA go below HOME.
# USER is for libraries that ask who runs them: the uid has no entry in /etc/passwd, nor has one a platform chooses.
# The driver's libraries for computing and for nvidia-smi; which GPUs is the runtime's to say.
ENV PATH=/opt/attn/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    USER=attn \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    ATTN_HOST=0.0.0.0 \
    ATTN_PORT=8000 \
    ATTN_GRPC_PORT=8001
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
# http.client and not urllib: a proxy named in the environment must not be asked for our own port. Its own certificate is
# nothing that it must look at; where callers need one, it has none to show, and another check takes its place.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, ssl, sys, http.client; at = {'host': '127.0.0.1', 'port': int(os.environ['ATTN_PORT']), 'timeout': 4}; door = http.client.HTTPSConnection(context=ssl._create_unverified_context(), **at) if os.environ.get('ATTN_TLS_CERTIFICATE_FILE') else http.client.HTTPConnection(**at); door.request('GET', '/readyz'); sys.exit(door.getresponse().status != 200)"]
# tini reaps and hands SIGTERM on; the service drains and exits 0.
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["attn", "serve"]

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="attn" \
      org.opencontainers.image.description="The attention service: POST query, key and value, get exact attention back." \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
