{{/* Autoscaling. All but the checks take (dict "root" $ "role" "prefill"). */}}

{{/* "true" when an autoscaler of this chart owns a role's number of pods. */}}
{{- define "tandem.scaled" -}}
{{- $there := or (ne .role "prefill") .root.Values.prefill.enabled -}}
{{- if and $there (ne .root.Values.scaling.by "none") (get .root.Values.scaling .role).enabled -}}true{{- end -}}
{{- end -}}

{{/* Label matchers of a role's series: the pods of its Deployment, or the first ones of its groups, in this namespace. */}}
{{- define "tandem.scalingMatchers" -}}
{{- $prometheus := .root.Values.scaling.prometheus -}}
{{- $pods := printf "%s-%s" (include "tandem.workloadName" .) (ternary "[0-9]+" "[a-z0-9]+-[a-z0-9]+" (ne (include "tandem.isGrouped" .) "")) -}}
{{- printf "%s=%q,%s=~%q" $prometheus.namespaceLabel .root.Release.Namespace $prometheus.podLabel $pods -}}
{{- with trimSuffix "," ($prometheus.matchers | default "") }},{{ . }}{{ end -}}
{{- end -}}

{{/* A query of scaling/queries.yaml for this release. Call with (dict "root" $ "role" "prefill" "name" "backlog"). */}}
{{- define "tandem.scalingQuery" -}}
{{- $scaling := .root.Values.scaling -}}
{{- $queries := .root.Files.Get "scaling/queries.yaml" | fromYaml -}}
{{- $query := (get (get $queries .role) .name).query -}}
{{- range $role := list "router" "prefill" "decode" -}}
{{- $matchers := include "tandem.scalingMatchers" (dict "root" $.root "role" $role) -}}
{{- $query = $query | replace (printf "{%s}" (upper $role)) (printf "{%s}" $matchers) -}}
{{- $query = $query | replace (printf "{%s," (upper $role)) (printf "{%s," $matchers) -}}
{{- end -}}
{{- $query = $query | replace "[WINDOW]" (printf "[%s]" $scaling.prometheus.window) -}}
{{- $query = $query | replace "[COST]" (printf "[%s]" $scaling.prometheus.costWindow) -}}
{{- $query | replace "QUANTILE" (toString $scaling.objectives.interTokenQuantile) | replace "STARTED" "0.5" -}}
{{- end -}}

{{/* What one member may have, by the name of the query. */}}
{{- define "tandem.scalingTargets" -}}
{{- $scaling := .root.Values.scaling -}}
{{- $own := get $scaling .role -}}
{{- if eq .role "router" -}}
requests: {{ int $own.requests }}
{{- else if eq .role "prefill" -}}
backlog: {{ mulf $own.tokensPerSecond $scaling.objectives.firstTokenSeconds $own.backlogShare | ceil | int64 }}
busy: {{ $own.busy }}
offered: {{ $own.busy }}
{{- else -}}
kv: {{ $own.kv }}
offered: {{ $own.kv }}
sequences: {{ int $own.sequences }}
interToken: {{ $scaling.objectives.interTokenSeconds }}
{{- end -}}
{{- end -}}

{{- define "tandem.scalingBehavior" -}}
{{- range $key, $rules := dict "scaleUp" .root.Values.scaling.behaviour.up "scaleDown" .root.Values.scaling.behaviour.down }}
{{ $key }}:
  stabilizationWindowSeconds: {{ int $rules.windowSeconds }}
  selectPolicy: Max
  policies:
    - type: Percent
      value: {{ int $rules.percent }}
      periodSeconds: {{ int $rules.periodSeconds }}
    - type: Pods
      value: {{ int $rules.pods }}
      periodSeconds: {{ int $rules.periodSeconds }}
{{- end }}
{{- end -}}

{{/* Name of an external metric at the adapter: one for each release, pool and query. Add "name" "backlog". */}}
{{- define "tandem.scalingMetric" -}}
{{- printf "%s_%s_%s_%s" .root.Release.Namespace (include "tandem.fullname" .root) .role (snakecase .name) | replace "-" "_" -}}
{{- end -}}

{{- define "tandem.checkScaling" -}}
{{- $scaling := .Values.scaling -}}
{{- if ne $scaling.by "none" -}}
{{- if not .Values.metrics.enabled -}}
{{- fail (printf "scaling.by is %s and metrics.enabled is false: nothing would be measured" $scaling.by) -}}
{{- end -}}
{{- range $role := list "router" "prefill" "decode" -}}
{{- $own := get $scaling $role -}}
{{- if gt (int $own.min) (int $own.max) -}}
{{- fail (printf "scaling.%s.min is %d: it must be at most scaling.%s.max, %d" $role (int $own.min) $role (int $own.max)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq (int $scaling.prefill.min) 0) (include "tandem.scaled" (dict "root" $ "role" "prefill")) -}}
{{- if ne $scaling.by "keda" -}}
{{- fail "scaling.prefill.min is 0 and scaling.by is hpa: only KEDA starts an empty pool, so use 1 or keda" -}}
{{- end -}}
{{- if eq (toString (get .Values.decode.settings "computes_prompts")) "false" -}}
{{- fail "scaling.prefill.min is 0 and decode.settings.computes_prompts is false: nobody would compute prompts while the pool is empty" -}}
{{- end -}}
{{- end -}}
{{- if gt (int $scaling.decode.sequences) (int (get .Values.decode.settings "max_sequences" | default 128)) -}}
{{- fail (printf "scaling.decode.sequences is %d: a decode member refuses before that, at max_sequences" (int $scaling.decode.sequences)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A number as KEDA reads it: without an exponent. */}}
{{- define "tandem.scalingNumber" -}}
{{- if eq (float64 .) (floor .) }}{{ printf "%.0f" (float64 .) }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* A number as a Kubernetes quantity: thousandths where it is no whole one. */}}
{{- define "tandem.scalingQuantity" -}}
{{- if eq (float64 .) (floor .) }}{{ printf "%.0f" (float64 .) }}{{ else }}{{ printf "%.0fm" (mulf . 1000 | ceil) }}{{ end -}}
{{- end -}}
