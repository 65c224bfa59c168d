{{/* Parts of network policies. */}}

{{/* Selects the pods of some roles. Call with (dict "root" $ "roles" (list "prefill" "decode")). */}}
{{- define "tandem.podSelector" -}}
matchLabels:
  app.kubernetes.io/name: {{ include "tandem.name" .root }}
  app.kubernetes.io/instance: {{ .root.Release.Name }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [{{ join ", " .roles }}]
{{- end -}}

{{- define "tandem.metricsIngress" -}}
{{- if and .Values.metrics.enabled .Values.networkPolicy.metricsFrom -}}
- from:
    {{- toYaml .Values.networkPolicy.metricsFrom | nindent 4 }}
  ports:
    - port: {{ int .Values.metrics.port }}
      protocol: TCP
{{- end -}}
{{- end -}}

{{/* What routers and members both call. DNS has no peer: a cache on the node is in no namespace. */}}
{{- define "tandem.egress" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- with .Values.otlpEndpoint }}
- ports:
    - port: {{ splitList ":" . | last | int }}
      protocol: TCP
{{- end }}
{{- if .Values.model.pull }}
- ports:
    - port: 443
      protocol: TCP
  {{- with .Values.networkPolicy.pull.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- with .Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}
