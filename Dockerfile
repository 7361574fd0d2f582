# d3engine for CPUs: `docker build --tag d3engine .`, then
# `docker run --rm -p 8000:8000 -v d3engine-models:/models d3engine serve qwen2.5-coder-1.5b --host 0.0.0.0 --api-key KEY`.
# --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 takes PyTorch for NVIDIA GPUs (and `--gpus all` to run).
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "torch>=2.11,<2.14" --index-url "${TORCH_INDEX}" \
    && wheel=$(ls /wheels/*.whl) && pip install --no-cache-dir "${wheel}[gguf,hub,serve]" && rm -rf /wheels \
    && useradd --create-home d3engine && mkdir /models && chown d3engine /models
USER d3engine
ENV XDG_CACHE_HOME=/models HF_HOME=/models/hub
VOLUME /models
EXPOSE 8000
ENTRYPOINT ["d3engine"]
CMD ["--help"]
