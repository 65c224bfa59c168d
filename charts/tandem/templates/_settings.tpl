{{/* Flags of the processes. Names and limits are in the Structs of router, prefill_svc and decode_svc. */}}

{{/* Settings that every process gets. Call with (dict "root" $ "role" "router" "port" 50051). */}}
{{- define "tandem.serverArgs" -}}
{{- $values := .root.Values -}}
{{- $drain := (get $values .role).drain -}}
- "--name=$(POD_NAME)"
{{- if eq $values.ipFamily "IPv6" }}
- "--listen=[::]:{{ int .port }}"
- "--advertise=[$(POD_IP)]:{{ int .port }}"
{{- else }}
- "--listen=0.0.0.0:{{ int .port }}"
- "--advertise=$(POD_IP):{{ int .port }}"
{{- end }}
- "--metrics-port={{ if $values.metrics.enabled }}{{ int $values.metrics.port }}{{ else }}none{{ end }}"
- "--model={{ $values.model.name }}"
- "--log-level={{ $values.logLevel }}"
- "--log-format=json"
- "--drain-timeout-s={{ int $drain.timeoutSeconds }}"
- "--drain-settle-s={{ $drain.settleSeconds }}"
{{- with $values.otlpEndpoint }}
- "--otlp-endpoint={{ . }}"
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
transport: ""
net_devices: transfer.netDevices
transfer_ports: transfer.portRange
{{- end -}}
