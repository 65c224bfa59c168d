{{/* Flags of the processes. Names and limits are in the Structs of router, prefill_svc and decode_svc. */}}

{{/* Settings that every process gets. Call with (dict "root" $ "role" "router" "port" 50051). */}}
{{- define "tandem.serverArgs" -}}
{{- $values := .root.Values -}}
{{- $drain := (get $values .role).drain -}}
- "--name=$(POD_NAME)"
- "--listen={{ include "tandem.everywhere" . }}"
- "--advertise={{ ternary "[$(POD_IP)]" "$(POD_IP)" (eq $values.ipFamily "IPv6") }}:{{ int .port }}"
- "--metrics-port={{ if $values.metrics.enabled }}{{ int $values.metrics.port }}{{ else }}none{{ end }}"
- "--model={{ $values.model.name }}"
- "--log-level={{ $values.logLevel }}"
- "--log-format=json"
- "--drain-timeout-s={{ int $drain.timeoutSeconds }}"
- "--drain-settle-s={{ $drain.settleSeconds }}"
{{- with $values.otlpEndpoint }}
- "--otlp-endpoint={{ . }}"
{{- end }}
{{- with include "tandem.securityArgs" . | trim }}
{{ . }}
{{- end }}
{{- end -}}

{{/* The free settings of a role. Whole numbers are written out: Helm reads every number as a float and would show 4.194304e+06. */}}
{{- define "tandem.extraArgs" -}}
{{- range $name, $value := (get .root.Values .role).settings }}
{{- $flag := $name | replace "_" "-" }}
{{- if kindIs "bool" $value }}
- "{{ ternary "--" "--no-" $value }}{{ $flag }}"
{{- else if kindIs "float64" $value }}
- "--{{ $flag }}={{ if eq $value (floor $value) }}{{ printf "%.0f" $value }}{{ else }}{{ $value }}{{ end }}"
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%v" $flag $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Settings that the chart itself gives, each with the value to use instead. */}}
{{- define "tandem.ownSettings" -}}
name: ""
config: ""
ready_fd: ""
advertise: ipFamily
listen: router.port or memberPort
metrics_port: metrics.port
model: model.name
served_model_name: model.servedName
dtype: model.dtype
weight_quantisation: model.weightQuantisation
adapters: model.adapters
context_tokens: model.contextTokens
page_tokens: model.pageTokens
log_level: logLevel
log_format: ""
drain_timeout_s: drain.timeoutSeconds
drain_settle_s: drain.settleSeconds
otlp_endpoint: otlpEndpoint
cell: cell
redis_url: redis.url or redis.secretName
decode: decode.replicas
prefill: prefill.enabled
transport: rdma.enabled
net_devices: transfer.netDevices or rdma.netDevices
transfer_ports: transfer.portRange
redis_sentinel_username: redis.sentinel.username
redis_sentinel_password: redis.sentinel.secretName
http_listen: router.http.enabled
ui: router.http.ui
health_listen: tls.healthPort
tls_cert_file: tls.secretName
tls_key_file: tls.secretName
tls_ca_file: tls.secretName
tls_client_ca_file: tls.clientCertificates
tls_server_name: tls.serverName
internal_identities: tls.serverName
cell_secret_file: auth.cellSecret
token_file: auth.tokens
jwt_key_file: auth.jwt
jwt_jwks_file: auth.jwt
jwt_jwks_url: auth.jwt.jwksUrl
jwt_issuer: auth.jwt.issuer
jwt_audience: auth.jwt.audience
jwt_algorithms: auth.jwt.algorithms
{{- end -}}
