# A reward function as a container (docs/rewards.md), without torch: only what `rubato serve-rewards` imports.
#   docker build -f configs/deploy/rewards.Dockerfile -t rewards .
#   docker run -p 8000:8000 -v $PWD/my_reward.py:/app/my_reward.py:ro -e RUBATO_REWARD_TOKEN rewards my_reward.py:brevity --workers 4
FROM python:3.12-slim

COPY . /src
RUN pip install --no-cache-dir --no-deps /src \
 && pip install --no-cache-dir "httpx>=0.27" "msgspec>=0.19" "pydantic>=2.7" "pyyaml>=6.0" "starlette>=0.37" "uvicorn>=0.30" \
 && rm -rf /src

WORKDIR /app
USER 65534
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["rubato", "serve-rewards", "--host", "0.0.0.0", "--port", "8000"]
