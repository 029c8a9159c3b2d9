# The gateway, slim: it forecasts with promoted versions and learns nothing. Not a build of vLLM.
# Checked for its form by tests/test_containers.py; not built or run there.
FROM python:3.12-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY presage presage
RUN pip install --no-cache-dir '.[gateway]' && useradd --create-home presage && install -d -o presage /data

USER presage
WORKDIR /data
# Compiled code and the registry outlive the container, in a volume.
ENV NUMBA_CACHE_DIR=/data/compiled
VOLUME /data
EXPOSE 8100
ENTRYPOINT ["presage"]
CMD ["gateway", "--simulate", "--listen", "0.0.0.0:8100"]
