{{/* How a router reaches the request store. All take the root. */}}

{{/* "true" when the chart runs its own store. */}}
{{- define "tandem.ownValkey" -}}
{{- if not (or .Values.redis.url .Values.redis.secretName) }}true{{ end -}}
{{- end -}}

{{/* The certificates as options of the address, which is where a router takes them from; empty without any. */}}
{{- define "tandem.redisOptions" -}}
{{- $tls := .Values.redis.tls -}}
{{- if $tls.secretName -}}
ssl_ca_certs=/etc/tandem/redis/ca.crt
{{- if $tls.clientCertificate -}}
&ssl_certfile=/etc/tandem/redis/tls.crt&ssl_keyfile=/etc/tandem/redis/tls.key
{{- end -}}
{{- end -}}
{{- end -}}

{{/* An address from a secret is a variable of its own, so that options can follow it without anybody having read it. */}}
{{- define "tandem.redisEnv" -}}
{{- $redis := .Values.redis -}}
{{- $options := include "tandem.redisOptions" . -}}
{{- if $redis.secretName -}}
- name: {{ ternary "REDIS_ADDRESS" "TANDEM_REDIS_URL" (ne $options "") }}
  valueFrom:
    secretKeyRef:
      name: {{ $redis.secretName }}
      key: {{ $redis.secretKey }}
{{- if $options }}
- name: TANDEM_REDIS_URL
  value: {{ printf "$(REDIS_ADDRESS)?%s" $options | quote }}
{{- end }}
{{- else -}}
{{- $url := $redis.url | default (printf "redis://%s-valkey:6379/0" (include "tandem.fullname" .)) -}}
- name: TANDEM_REDIS_URL
  value: {{ ternary (printf "%s%s%s" $url (ternary "&" "?" (contains "?" $url)) $options) $url (ne $options "") | quote }}
{{- end -}}
{{- with $redis.sentinel.secretName }}
- name: TANDEM_REDIS_SENTINEL_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $redis.sentinel.secretKey }}
{{- end }}
{{- with $redis.sentinel.username }}
- name: TANDEM_REDIS_SENTINEL_USERNAME
  value: {{ . | quote }}
{{- end }}
{{- end -}}
