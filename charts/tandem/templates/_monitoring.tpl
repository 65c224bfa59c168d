{{/* Parts of what a Prometheus operator and a Grafana read. */}}

{{/* Labels of the chart and those by which they are found. Call with (dict "root" $ "labels" .Values...labels). */}}
{{- define "tandem.monitoringLabels" -}}
{{- $own := include "tandem.labels" (dict "root" .root "role" "metrics") | fromYaml -}}
{{- toYaml (mergeOverwrite $own (.labels | default dict)) -}}
{{- end -}}

{{/* How each pod is read. The rules and dashboards tell cells apart by `cell`, and roles of pods by `role`. */}}
{{- define "tandem.endpoint" -}}
- port: metrics
  path: /metrics
  interval: {{ .Values.metrics.monitor.interval }}
  scrapeTimeout: {{ .Values.metrics.monitor.scrapeTimeout }}
  relabelings:
    - sourceLabels: [__meta_kubernetes_pod_label_app_kubernetes_io_component]
      targetLabel: role
    - targetLabel: cell
      replacement: {{ include "tandem.cell" . | quote }}
{{- end -}}

{{/* A name for an object made of a file of the chart: rules/slo_burn.yaml gives slo-burn. */}}
{{- define "tandem.fileName" -}}
{{- base . | trimSuffix (ext .) | lower | replace "_" "-" | replace "." "-" -}}
{{- end -}}
